"""How are logits and feed-forwards of long sequences kept out of memory?"""
