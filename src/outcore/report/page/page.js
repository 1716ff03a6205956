"use strict";
(() => {
  const detail = document.getElementById("detail");
  let chosen = null;

  function show(event) {
    const box = event.target.closest ? event.target.closest(".track rect") : null;
    if (!box || !detail) return;
    if (chosen) chosen.classList.remove("chosen");
    chosen = box;
    box.classList.add("chosen");
    detail.textContent = box.querySelector("title").textContent;
  }
  document.addEventListener("pointerover", show);
  document.addEventListener("click", show);

  const zoom = document.getElementById("zoom");
  if (zoom) {
    zoom.addEventListener("input", () => {
      const frames = [...document.querySelectorAll(".scroll")].filter((f) => f.querySelector(".wide"));
      const middles = frames.map((f) => (f.scrollLeft + f.clientWidth / 2) / f.scrollWidth);
      document.documentElement.style.setProperty("--zoom", zoom.value);
      frames.forEach((f, i) => { f.scrollLeft = middles[i] * f.scrollWidth - f.clientWidth / 2; });
    });
  }

  function value(row, column) {
    const text = row.cells[column].dataset.value;
    const number = Number(text);
    return text === "" || Number.isNaN(number) ? text : number;
  }

  function compare(a, b) {
    return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = head.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...table.tBodies[0].rows];
        rows.sort((a, b) => (down ? -1 : 1) * compare(value(a, column), value(b, column)));
        table.tBodies[0].append(...rows);
      });
    });
  }
})();
