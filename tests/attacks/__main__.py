"""See `run`."""

from tests.attacks.run import main

if __name__ == "__main__":
    main()
