"""What SageMaker runs under torchrun: its hyperparameters, ``--name value``, go to the recipe.

A hyperparameter's name may be any option of ``recipes.train fit``, such as ``trainer.max_epochs``.
"""

from __future__ import annotations

import os
import sys

from recipes.train import main

if __name__ == "__main__":
    sys.argv.insert(1, "fit")
    sys.argv += [
        f"--trainer.num_nodes={os.environ['GROUP_WORLD_SIZE']}",  # of torchrun: hosts
        f"--trainer.devices={os.environ['LOCAL_WORLD_SIZE']}",  # and processes on this one
    ]
    main()
