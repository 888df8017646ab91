"""Settings of the test run; they must be there before jax is imported.

They are environment variables, so that the processes that a test starts have
them too and tests that need no jax do not import it.
"""

import os
import pathlib
import shutil
import tempfile

from absl import flags

_scratch = pathlib.Path(tempfile.mkdtemp(prefix='diloco_jax_tests_'))

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'

# One compilation cache for the whole test run: compiling is the larger part
# of the time, and many tests compile the same step.
os.environ['JAX_COMPILATION_CACHE_DIR'] = str(_scratch / 'compiled')
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'

# Temporary files of absltest, apart from those of other runs. It reads a flag
# for them, and pytest parses none.
os.environ['TEST_TMPDIR'] = str(_scratch / 'files')
flags.FLAGS.mark_as_parsed()


def pytest_unconfigure(config):
  del config
  shutil.rmtree(_scratch, ignore_errors=True)
