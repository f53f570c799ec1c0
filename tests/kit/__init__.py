"""What tests of several rooms share: engines that follow a script, policies that are known, tiny models, references."""
