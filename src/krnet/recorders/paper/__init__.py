"""The paper's network: sample ID -> feature map."""
