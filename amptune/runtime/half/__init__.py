"""Half weights and their FP32 masters, as Apex's levels O2 and O3 have them."""
