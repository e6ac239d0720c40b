"""How a run is assembled from its config, and how it starts or resumes."""
