"""What runs on which device: meshes, processes, compiled programs and their cache, offloaded moments."""
