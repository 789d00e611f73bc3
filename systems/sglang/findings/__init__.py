"""What was found in SGLang: a page each, and the scenario that shows it on a release."""
