"""The workdirs and stock folders of tests/encoders/conftest.py are what is measured here too."""

from encoders.conftest import copy_stock, vocabulary, workdirs  # noqa: F401
