"""New adapter packages: one skeleton in `template/`, which `mrv2 new-adapter` and cookiecutter render alike."""
