"""How does a token reach its expert?"""
