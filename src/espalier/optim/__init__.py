"""How does a parameter move?"""
