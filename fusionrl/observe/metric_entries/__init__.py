"""The entries of the glossary of metrics, by what they measure."""
