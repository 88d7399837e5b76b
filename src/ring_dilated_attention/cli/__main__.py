"""``python -m ring_dilated_attention.cli``."""

from . import main

if __name__ == "__main__":
    main()
