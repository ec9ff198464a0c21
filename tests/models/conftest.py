import sys
from pathlib import Path

# The models of these tests (tiny.py) are a module of their own, so that their file stays readable.
sys.path.insert(0, str(Path(__file__).parent))
