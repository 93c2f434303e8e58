"""Which rank runs which part of the model, when?"""
