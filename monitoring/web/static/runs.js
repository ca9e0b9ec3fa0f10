// Keeps the list of runs fresh; what a person has chosen and focused stays.
"use strict";

const LOOK_MILLISECONDS = 5000;

async function look() {
  if (document.hidden) return;
  const line = document.getElementById("line");
  try {
    const answer = await fetch(location.pathname);
    if (!answer.ok) throw new Error(answer.statusText);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const places = [...document.querySelectorAll("[data-section]")];
    const found = [...fresh.querySelectorAll("[data-section]")];
    if (places.length !== found.length) return location.reload();
    const chosen = new Set([...document.querySelectorAll(":checked")].map((box) => box.value));
    const focused = document.activeElement && (document.activeElement.value || document.activeElement.href);
    places.forEach((place, index) => (place.innerHTML = found[index].innerHTML));
    for (const each of document.querySelectorAll("[data-section] input, [data-section] a")) {
      if (each.type === "checkbox") each.checked = chosen.has(each.value);
      if (focused && (each.value || each.href) === focused) each.focus({ preventScroll: true });
    }
    line.textContent = "";
  } catch (error) {
    line.textContent = "This list is old: whoever serves it cannot be reached.";
  }
}

setInterval(look, LOOK_MILLISECONDS);
