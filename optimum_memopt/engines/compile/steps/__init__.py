"""Steps under several plans and with any micro-batch, predicted from one trace of the model."""
