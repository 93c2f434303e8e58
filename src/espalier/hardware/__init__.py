"""What do I have?"""
