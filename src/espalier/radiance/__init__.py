"""How is a scene trained? Radiance fields on voxel grids, with plain and with spiking colour networks."""
