"""Settings of the test run; they must be there before jax is imported.

They are environment variables, so that the processes that a test starts have
them too and tests that need no jax do not import it.
"""

import os
import shutil
import tempfile

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'

# One compilation cache for the whole test run: compiling is the larger part
# of the time, and many tests compile the same step.
_cache_dir = tempfile.mkdtemp(prefix='diloco_jax_test_cache_')
os.environ['JAX_COMPILATION_CACHE_DIR'] = _cache_dir
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'


def pytest_unconfigure(config):
  del config
  shutil.rmtree(_cache_dir, ignore_errors=True)
