"""How is a long sequence split?"""
