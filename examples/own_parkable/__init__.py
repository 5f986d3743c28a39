"""A project that has its own parking code and tests it with the contract of ``pytest_park``.

``shelf.py`` and ``voice.py`` know nothing of this repository's packages. ``tests/test_shelf.py`` is all that it takes
to find out which promises the code keeps: run it with ``pytest examples/own_parkable``.
"""
