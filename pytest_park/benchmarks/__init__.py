"""What a transfer costs: ``pytest --benchmark-only --pyargs pytest_park.benchmarks``, on a GPU with ``--real-gpu``.

On the fake device the numbers are those of copies within the host's memory. They show that the benchmarks run and what
our code adds to a bare copy, not what a card and its bus would do.
"""
