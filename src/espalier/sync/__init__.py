"""When do replicas agree?"""
