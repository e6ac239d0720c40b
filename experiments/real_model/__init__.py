"""A real model that learns on two cores: its runs, its controls, its figure."""
