"""Released code of other projects under the contract, on the fake device: ``tox -e patients``."""
