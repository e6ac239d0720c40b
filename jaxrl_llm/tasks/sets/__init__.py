"""Sets of problems: generated, published, and the user's own."""
