"""Devices and processes of a run: meshes, compiled programs and their cache, offloaded moments."""
