"""The request table, block tables, and one step's inputs."""
