"""Sets of problems: generated, published, and one's own."""
