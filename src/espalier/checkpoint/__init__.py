"""What survives a stop?"""
