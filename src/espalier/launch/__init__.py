"""How do the ranks start?"""
