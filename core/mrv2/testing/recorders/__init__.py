"""Files to be copied into other repositories: each stands alone."""
