"""How do ranks share a matrix?"""
