"""What the example scripts share: arguments, data that pip installs, and a model that pip installs."""
