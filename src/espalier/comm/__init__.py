"""What crosses the wire?"""
