"""A run has collapsed and is continued from its alarm: which remedy saves how many?"""
