// Before the first paint: the theme that was chosen here, else the system's.
"use strict";

const systemTheme = matchMedia("(prefers-color-scheme: dark)");

function chosenTheme() {
  try {
    return localStorage.getItem("treewire-theme");
  } catch {
    return null; // storage may be forbidden; then the system's theme it is
  }
}

document.documentElement.dataset.theme = chosenTheme() ?? (systemTheme.matches ? "dark" : "light");
