"""Imports of every process that reads a tokenizer; the run's nursery makes them once."""

from fusionrl.data.tokenizer import import_auto_tokenizer

import_auto_tokenizer()
