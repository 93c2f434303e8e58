"""Where does each tensor live?"""
