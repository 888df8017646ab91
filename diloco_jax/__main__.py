"""`python -m diloco_jax`."""

import sys

from diloco_jax import main

if __name__ == '__main__':
  sys.exit(main.main(sys.argv))
