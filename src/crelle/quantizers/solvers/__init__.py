"""The loops inside the schemes: levels of groups, GPTQ's error propagation, coordinate descent."""
