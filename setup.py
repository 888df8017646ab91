"""Packaging of diloco_jax."""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent
INIT = (ROOT / 'diloco_jax' / '__init__.py').read_text(encoding='utf-8')
VERSION = re.search(r"^__version__ = '([^']+)'$", INIT, re.MULTILINE).group(1)
README = ROOT / 'README.md'

setuptools.setup(
  name='diloco_jax',
  version=VERSION,
  description=(
    'Decoupled DiLoCo and its family in JAX: train one model on many islands'
    ' of accelerators that fail, stall and sit far apart.'
  ),
  long_description=README.read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  packages=setuptools.find_packages(include=['diloco_jax', 'diloco_jax.*']),
  python_requires='>=3.11',
  install_requires=[
    'absl-py>=2.1',
    'flax>=0.12',
    'grain>=0.2.10',
    'grpcio>=1.66',
    'jax>=0.10',
    'matplotlib>=3.8',
    'ml_collections>=1.0',
    'numpy>=2.0',
    'optax>=0.2.5',
    'orbax-checkpoint>=0.11.30',
    'rich>=13',
    'tensorboardX>=2.6',
    'xxhash>=3.4',
  ],
  extras_require={
    'test': [
      'cryptography>=42',
      'hypothesis>=6.100',
      'mypy>=1.11',
      'pytest>=8',
      'ruff>=0.17,<0.18',  # a formatter: its output is part of the style
    ],
    'colab': ['ipykernel', 'nbclient', 'nbformat'],
    'tpu': ['jax[tpu]'],
    'vision': ['scikit-learn'],
    'ray': ['ray'],
  },
  classifiers=[
    'Intended Audience :: Science/Research',
    'License :: OSI Approved :: Apache Software License',
    'Programming Language :: Python :: 3',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
  ],
)
