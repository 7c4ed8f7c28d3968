"""Files: checkpoints and model directories, read with limits and written so that none looks finished early."""
