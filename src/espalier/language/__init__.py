"""How is a language model trained?"""
