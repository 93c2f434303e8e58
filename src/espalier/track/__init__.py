"""What happened?"""
