"""How do ranks stand to one another?"""
