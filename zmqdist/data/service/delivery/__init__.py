"""How elements are dealt to one reader: a machine for each guarantee, behind one interface."""
