"""One line for the frameworks people train with. Each submodule needs its framework only when it is imported:

    misa.integrations.transformers   Hugging Face Trainer
    misa.integrations.lightning      Lightning's Trainer
    misa.integrations.accelerate     scripts with an Accelerator
"""
