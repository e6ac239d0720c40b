"""How routers drift under reinforcement learning, and what replaying their routes changes.

See README.md.
"""
