"""The claims of "Mixed Precision Training" (ICLR 2018), made again in small."""
