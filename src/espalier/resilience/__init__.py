"""What if something breaks?"""
